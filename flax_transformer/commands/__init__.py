"""Commands: parse, call, print. No mathematics."""
