"""A server that speaks the OpenAI completions protocol, checked through token log-probabilities alone."""
