"""Plots: values as Vega specifications, which pages and reports draw, and `vl-convert` as pictures.

A specification is a plain dict with its data inside, and the same values give the same one. It says
which colours mean a type; all other colours and fonts are in `theme`. Its ``description`` is for
screen readers, and ``usermeta.table`` has the same values as text: ``columns`` and ``rows``.
"""
