"""A server as several processes: started, supervised, ended."""
