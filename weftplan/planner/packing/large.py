from weftplan.planner.packing.greedy import portfolio
THRESHOLD = 3000
