"""A fleet in virtual time: the router's own scheduling code before the simulated engines' own model, on a
discrete-event clock."""
