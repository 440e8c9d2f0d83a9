"""NSA attention: ``reference`` is the truth, ``blocks`` the integer maths, ``sdpa`` the fast form, ``dispatch`` chooses."""
