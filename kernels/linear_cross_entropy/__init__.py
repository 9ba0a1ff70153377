"""Output head and next-token loss in one, without the logits of all tokens and classes at once."""
