"""Making committed rounds again, by somebody who trusts no coordinator."""
