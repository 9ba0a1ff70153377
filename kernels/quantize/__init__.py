"""Low-precision number formats of matrix-product operands."""
