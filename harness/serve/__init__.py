"""A mock of an OpenAI-compatible server whose timing is known: `bench mock`."""
