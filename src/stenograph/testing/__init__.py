"""Complete stand-ins and suites for the tests of Stenograph and of those who extend it."""
