"""A stored model for mlx-lm: its network, its tokenizer, its answers.

| module | what it has |
| --- | --- |
| `loading` | `load`, `load_network`, and the check of a plan |
| `model_texts` | what a model's layers and documents say about prompts and sampling |
| `prompts` | the prompt for a conversation: by the model's chat template, or Ollama's |
| `template_process` | chat templates in a process of their own, with limits |
| `go_templates`, `go_syntax` | Ollama's templates |
| `sampling_settings` | the parameters of an answer, and which of them counts |
| `conversation` | an answer, token by token; a conversation with its cache of keys and values |
| `chat_service`, `chat_handler` | mlx-lm's OpenAI-compatible handler over a stored model |
| `chat_requests` | what is checked of a request before that |
"""

from blobstore.mlx_lm.loading import check_plan, load, load_network, planned_network

__all__ = ["check_plan", "load", "load_network", "planned_network"]
