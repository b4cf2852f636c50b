"""The version, as in pyproject.toml: apart, so that modules that need it do not import the API."""

__version__ = "0.1.0"
