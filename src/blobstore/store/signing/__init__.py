"""Signing: keys, signatures of models, and the policies that require them."""
