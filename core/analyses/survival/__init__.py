"""Questions about times to an event: curves, and what explains them.

Times are on a public grid. What a silo sends of them is by interval, of which each that is told of has at
least the least count of people.
"""
