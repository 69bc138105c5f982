"""The command `bench`: parse, call, print."""
