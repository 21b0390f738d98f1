"""Tools that are run by hand or by CI; nothing in the product imports them."""
