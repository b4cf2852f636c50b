"""A stored model for mlx-lm: its network, its tokenizer, its answers.

| module | what it has |
| --- | --- |
| `loading` | `load`, `load_network`, and the check of a plan |
| `prompts` | what a model says about prompts and sampling; the prompt for a conversation |
| `template_process` | chat templates in a process of their own, with limits |
| `sampling_settings` | the parameters of an answer, and which of them counts |
| `conversation` | an answer, token by token; a conversation with its cache of keys and values |
| `chat_requests` | requests of OpenAI's protocol, checked |
| `chat_service` | the thread that answers them, by mlx-lm's `BatchGenerator`, in OpenAI's form |
"""

from blobstore.mlx_lm.loading import check_plan, load, load_network, planned_network

__all__ = ["check_plan", "load", "load_network", "planned_network"]
