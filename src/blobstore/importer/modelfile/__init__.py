"""Modelfile: the texts and settings that go beside a model's weights."""
