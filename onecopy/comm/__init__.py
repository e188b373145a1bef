"""Between ranks: the only folder that issues collectives."""
