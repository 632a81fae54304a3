# The hidden tests. Prints how many of them pass.
ok=0 all=0
try() {
	all=$((all+1))
	[ "$(printf "$2" | sh words.sh $1 2>/dev/null)" = "$(printf "$3")" ] && ok=$((ok+1))
}
try 5 '' ''
try 5 'a b a c a b' '3 a\n2 b\n1 c'
try 2 'a b a c a b' '3 a\n2 b'
try 9 'To be, or not to be' '2 be\n2 to\n1 not\n1 or'
echo "$ok of $all"
