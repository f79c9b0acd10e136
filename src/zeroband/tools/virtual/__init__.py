"""Runs in virtual time: the rules of production decide, models say how long everything takes."""
