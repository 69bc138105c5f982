"""What was asked, checked and made into a design: arms, blocks, order, seeds, stopping."""
