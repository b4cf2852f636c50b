"""A store in a local folder, as Ollama lays it out."""
