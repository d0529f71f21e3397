"""Commands of the people of one machine: how they are asked, and pools of nodes that one sizes."""
