"""`zeroband top`: a run in a terminal. Owns the screen that `top` and `demo` share."""
