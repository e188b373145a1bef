"""Between tiers: the only folder that allocates or moves bulk storage."""
