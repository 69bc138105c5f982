"""Records to metrics: pure functions, one number per metric for one boot of one arm."""
