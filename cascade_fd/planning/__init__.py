"""From a tree to a plan, on the host only. In the order in which a plan is made:

planner     checks the options and leads through the rest
work        a plan in the making
payoff      which shared nodes are computed once: weigh compares whole plans, cost predicts their times, choice records it
splits      how finely ranges are cut
layout      numbers the states, lists the items, brings the arrays to the device
worklist    what comes out: Plan, Launch, MergeRows, and the loop that decodes them
update      plans with room to spare, and plans copied into them
explain     a plan in words; draw: in a picture; facts: the counts behind both; from_file: a batch from a file
"""
