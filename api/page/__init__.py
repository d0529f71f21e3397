"""The page of a coordinator, for people: `roundtable server` serves it, browsers show it."""
