"""The web server: pages over a store, ``/api/`` and ``/v2/``. It only reads.

`routes` is the table of ``/api/``: the application and the OpenAPI document are made from it.
Needs the extra ``web``.
"""
