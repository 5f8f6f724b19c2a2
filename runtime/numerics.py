"""The version of the sums that logits are made of.

Raise ``NUMERICS`` by one in the commit that changes the bits of a logit on purpose: another order
of additions, another accumulator, another approximation of exp. A baseline of the load-time gate
holds token ids under this version, and they are compared only while it is the same.
``tests/runtime/test_numerics.py`` fails until the version and its recorded logits are renewed
together.
"""

NUMERICS = 1
