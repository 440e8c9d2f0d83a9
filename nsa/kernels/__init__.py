"""NSA attention: ``reference`` is the truth, ``blocks`` the integer maths, ``dispatch`` chooses among those that serve:
``cpu`` and ``triton`` (as operators, in ``ops``), ``flash``, and ``sdpa``, torch's own attention under masks."""
