"""Bad input on purpose: cases made from a seed and a number, and what they are tried on."""
