"""Random networks, folded and judged in float64 by evaluators that share no code with bnfold."""
