"""`zeroband data`: tokenize text once for all runs (prepare), inspect the result, audit what a run trained on."""
