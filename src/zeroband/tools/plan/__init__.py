"""`zeroband plan`: predicts memory, traffic, time and compute utilisation of each outer algorithm from formulas."""
