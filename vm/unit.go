package vm

// Unit is the systemd unit of the agent inside a guest operating system, whose
// program lies at /usr/sbin/dsec-guest. The commands of a sandbox outlive
// nothing: without its agent nobody knows them.
const Unit = `[Unit]
Description=DSec guest agent
DefaultDependencies=no
After=local-fs.target systemd-remount-fs.service systemd-udevd.service
ConditionVirtualization=vm

[Service]
ExecStart=/usr/sbin/dsec-guest agent
Delegate=yes
Restart=always
RestartSec=1
Environment=GOMAXPROCS=1 GOGC=25
LimitNOFILE=65536
TasksMax=infinity

[Install]
WantedBy=multi-user.target
`
