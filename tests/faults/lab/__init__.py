"""The fault laboratory's tools."""
