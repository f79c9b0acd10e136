"""`zeroband plan`: bytes, time and compute utilisation of each outer algorithm, from formulas. Measures nothing."""
