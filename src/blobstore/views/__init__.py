"""Views: results as documents.

What ``--json`` prints, what a program or a web page gets, and what the docs list.
"""
