"""Matrix product of row groups, each with its own weight (the experts of a MoE layer)."""
