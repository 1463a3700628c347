"""The replica role: a vLLM engine with its OpenAI-compatible server that follows the weight versions of a branch."""
