"""Where SGLang looks for models first (SGLANG_EXTERNAL_MODEL_PACKAGE). To know that it has an architecture it
would import all of its own otherwise, and a clock stands in for each."""
