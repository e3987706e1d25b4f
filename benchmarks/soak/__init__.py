"""Does the server stay as it is under a mixed load with faults?"""
