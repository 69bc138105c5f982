"""What is asked of an engine, and when: plain data, made from a few options and a seed."""
