"""A stored model for mlx-lm: its network, its tokenizer, its answers.

| module | what it has |
| --- | --- |
| `loading` | `load`, `load_network`, and the check of a plan |
| `model_texts` | what a model's layers and documents say about prompts and sampling |
| `prompts`, `go_templates` | the prompt for a conversation: the model's chat template, or Ollama's |
| `sampling` | the parameters of an answer, and which of them counts |
| `conversation` | an answer, token by token; a conversation with its cache of keys and values |
| `chat_requests`, `chat_service` | mlx-lm's OpenAI-compatible handler over a stored model |
"""

from blobstore.mlx_lm.loading import check_plan, load, load_network, planned_network

__all__ = ["check_plan", "load", "load_network", "planned_network"]
