"""What a store can say about itself: its audit, its times and rates, and how well its scorers repeat themselves."""
