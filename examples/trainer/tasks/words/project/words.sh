# Prints the N most frequent words of standard input as "count word": the most
# frequent first, equally frequent ones in alphabetical order. Case is nothing.
n=${1:-10}
tr -cs A-Za-z '\n' | grep . | uniq -c | sort -k1,1n -k2,2 | awk '{print $1, $2}' | head -n "$n"
