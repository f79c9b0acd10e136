"""What is done with runs from outside: starting, watching, breaking, comparing, planning, commanding them.

Nothing below imports it.
"""
