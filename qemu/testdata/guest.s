# The guest of the tests: a boot sector. It prints the first 16 bytes of the second
# disk on its serial port at each tick of its clock, and shows and prints what is
# typed; P panics, Q powers off, F prints without end. Made by:
#   as --32 guest.s -o guest.o && ld -m elf_i386 -Ttext 0x7c00 --oformat binary -o guest guest.o
.code16
.globl _start
_start:
  xorw %ax,%ax
  movw %ax,%ds
  movw %ax,%es
  movw %ax,%ss
  movw $0x7c00,%sp
  sti
again:
  movw $dap,%si
  movb $0x42,%ah
  movb $0x81,%dl
  int $0x13
  jc key
  movw $0x7e00,%si
  movw $16,%cx
1: lodsb
  call serial
  loop 1b
  movb $10,%al
  call serial
key:
  movb $1,%ah
  int $0x16
  jz wait
  xorb %ah,%ah
  int $0x16
  pushw %ax
  movb $0x0e,%ah
  movw $7,%bx
  int $0x10
  popw %ax
  call serial
  cmpb $'P',%al
  je panic
  cmpb $'Q',%al
  je off
  cmpb $'F',%al
  je flood
  jmp key
wait:
  hlt
  jmp again
flood:
  call serial
  jmp flood
panic:
  movw $text,%si
2: lodsb
  call serial
  testb %al,%al
  jnz 2b
  movb $0xfe,%al
  outb %al,$0x64
  hlt
off:
  movw $0x604,%dx
  movw $0x2000,%ax
  outw %ax,%dx
  hlt
serial:
  movw $0x3f8,%dx
  outb %al,%dx
  ret
dap: .byte 16,0
  .word 1,0x7e00,0
  .quad 0
text: .asciz "\nKernel panic - not syncing: test\n"
.org 510
.byte 0x55,0xaa
