"""A recipe: the stages of one experiment config, run in order in one folder and resumed there."""
