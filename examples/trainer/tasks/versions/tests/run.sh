# The hidden tests. Prints how many of them pass.
ok=0 all=0
try() {
	all=$((all+1))
	[ "$(sh versions.sh $1 $3 2>/dev/null)" = "$2" ] && ok=$((ok+1))
}
try 1.0.0 '=' 1.0.0
try 1.10 '>' 1.9
try 2.0.9 '<' 2.0.11
try v1.4 '=' 1.4
try 1.0 '=' 1.0.0
try v3 '>' 2.9
echo "$ok of $all"
