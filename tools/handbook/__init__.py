"""The site: reference pages out of the code, its sources below build/, and a check of what was built."""
