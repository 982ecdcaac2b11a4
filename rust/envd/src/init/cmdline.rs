//! The `aenv.*` parameters of the kernel command line.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use crate::log;
use crate::machine::names::is_hostname;

/// What the host tells the guest at boot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameters {
    /// `aenv.root`: the device of the root filesystem, ext4.
    pub root: String,
    /// `aenv.ip`: eth0's address and prefix length.
    pub address: Address,
    /// `aenv.gw`: the default route.
    pub gateway: Ipv4Addr,
    /// `aenv.dns`: the name server.
    pub dns: IpAddr,
    /// `aenv.hostname`.
    pub hostname: String,
    /// `aenv.mailbox`: the physical address of memory that the host talks through, in hexadecimal.
    pub mailbox: Option<u64>,
}

/// An address with its prefix length, `169.254.0.21/30`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// The address.
    pub ip: Ipv4Addr,
    /// 0..=32.
    pub prefix: u8,
}

impl Address {
    /// The prefix as a mask.
    pub fn netmask(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(u32::MAX.checked_shl(32 - u32::from(self.prefix)).unwrap_or(0))
    }
}

impl FromStr for Address {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (ip, prefix) = text.split_once('/').ok_or(())?;
        let prefix = prefix.parse().map_err(|_| ())?;
        if prefix > 32 {
            return Err(());
        }
        Ok(Self { ip: ip.parse().map_err(|_| ())?, prefix })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.ip, self.prefix)
    }
}

impl Default for Parameters {
    fn default() -> Self {
        let gateway = Ipv4Addr::new(169, 254, 0, 22);
        Self {
            root: "/dev/vda".into(),
            address: Address { ip: Ipv4Addr::new(169, 254, 0, 21), prefix: 30 },
            gateway,
            dns: gateway.into(),
            hostname: "sandbox".into(),
            mailbox: None,
        }
    }
}

impl Parameters {
    /// Those of /proc/cmdline.
    pub fn read() -> Self {
        Self::parse(&std::fs::read_to_string("/proc/cmdline").unwrap_or_default())
    }

    /// A parameter that is absent or makes no sense (which is logged) keeps its default: a guest that boots can be reached and asked.
    fn parse(cmdline: &str) -> Self {
        let mut parameters = Self::default();
        for word in cmdline.split_whitespace() {
            let Some((name, value)) = word.strip_prefix("aenv.").and_then(|rest| rest.split_once('=')) else {
                continue;
            };
            let understood = match name {
                "root" if value.starts_with("/dev/") => {
                    parameters.root = value.to_owned();
                    true
                }
                "hostname" if is_hostname(value) => {
                    parameters.hostname = value.to_owned();
                    true
                }
                "mailbox" => {
                    let digits = value.strip_prefix("0x").unwrap_or_default();
                    parameters.mailbox = u64::from_str_radix(digits, 16).ok();
                    parameters.mailbox.is_some()
                }
                "ip" => set(&mut parameters.address, value),
                "gw" => set(&mut parameters.gateway, value),
                "dns" => set(&mut parameters.dns, value),
                _ => false,
            };
            if !understood {
                log!("ignoring kernel parameter '{word}'");
            }
        }
        parameters
    }
}

fn set<T: FromStr>(target: &mut T, text: &str) -> bool {
    text.parse().map(|value| *target = value).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_parameters() {
        let parameters = Parameters::parse(
            "console=ttyS0 aenv.root=/dev/vdb aenv.ip=10.0.0.2/24 aenv.gw=10.0.0.1 aenv.dns=10.0.0.3 aenv.hostname=h aenv.mailbox=0x800000 quiet\n",
        );
        assert_eq!((parameters.root.as_str(), parameters.hostname.as_str()), ("/dev/vdb", "h"));
        assert_eq!(parameters.mailbox, Some(8 << 20));
        assert_eq!(parameters.address.to_string(), "10.0.0.2/24");
        assert_eq!(parameters.address.netmask(), Ipv4Addr::new(255, 255, 255, 0));
        assert_eq!((parameters.gateway, parameters.dns), (Ipv4Addr::new(10, 0, 0, 1), "10.0.0.3".parse().expect("ip")));
    }

    #[test]
    fn nonsense_keeps_the_defaults() {
        let cmdline =
            "aenv.root=vda aenv.ip=10.0.0.2 aenv.ip=1.1.1.1/33 aenv.gw=x aenv.dns= aenv.hostname=a/b aenv.mailbox=8 aenv.new=1 aenv.";
        assert_eq!(Parameters::parse(cmdline), Parameters::default());
        assert_eq!(Parameters::default().address.netmask(), Ipv4Addr::new(255, 255, 255, 252));
        assert_eq!(Address { ip: Ipv4Addr::UNSPECIFIED, prefix: 0 }.netmask(), Ipv4Addr::UNSPECIFIED);
    }
}
